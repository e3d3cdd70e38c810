"""Serving: blocks on different hosts, composed into text."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc loads: what it logs by itself is told by our errors, in fewer words
