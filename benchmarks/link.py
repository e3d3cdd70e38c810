"""How late the user-space link is on this machine: one row for each delay, bandwidth and size, then one JSON line.

    python benchmarks/link.py [--repeats 50]

A ping of some bytes through the link, answered with one byte, beside the same ping without it. `late` is the median beyond what the link promises
(RTT + bytes / bandwidth) and what the ping takes without it; for delay 0 and no bandwidth that is the link's own overhead, there and back.
"""

from __future__ import annotations

import argparse
import json

from blocktrain.report.netlink import Links, accuracy

CASES = (
    (0.0, 0.0, 64),
    (0.0, 0.0, 65_536),
    (20.0, 0.0, 64),
    (50.0, 0.0, 64),
    (100.0, 0.0, 64),
    (100.0, 0.0, 65_536),
    (0.0, 20.0, 65_536),
    (50.0, 20.0, 139_000),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    print(f"{'RTT ms':>7} {'Mbit/s':>7} {'bytes':>8} {'promised ms':>12} {'median ms':>10} {'worst ms':>9} {'late ms':>8}")
    rows = []
    with Links() as links:
        for rtt_ms, mbit_s, size in CASES:
            row = accuracy(links, rtt_ms, mbit_s, size, options.repeats)
            rows.append(row)
            figures = f"{row['promised_ms']:12.2f} {row['median_ms']:10.2f} {row['worst_ms']:9.2f} {row['late_ms']:8.2f}"
            print(f"{rtt_ms:7g} {mbit_s:7g} {size:8} {figures}", flush=True)
    print(json.dumps({"benchmark": "link", "rows": rows}))


if __name__ == "__main__":
    main()
