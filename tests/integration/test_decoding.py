"""Text from a chain of blocks: every mode, alone and beside others, in pieces and at once, gives what it must to the byte."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktrain.diffusion.noise import make_partition
from blocktrain.errors import ConfigError
from blocktrain.model.transformer import BlockStack
from blocktrain.serving.chain import Chain, LocalChain, Step
from blocktrain.serving.compute import BlockRunner, Job, Settings, TextMemory, round_as_sent
from blocktrain.serving.decoding import Counts, Draft, OtherDraft, OwnDraft, Plan, generate
from blocktrain.serving.sampling import Sampling, pick
from blocktrain.training.checkpoint import LoadedRun
from blocktrain.training.composition import Composer
from tests.conftest import CLEAN, PAPER, tiny_config


def made_run(objective: dict[str, Any], **sections: Any) -> LoadedRun:
    """A run with random weights everywhere."""
    config = tiny_config(objective=objective, **sections)
    stack = BlockStack.of(config)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in stack.named_parameters():  # later blocks change little, or no draft would ever be right
            p.add_((0.02 if name.startswith(("blocks.1", "blocks.2")) else 0.2) * torch.randn(p.shape, generator=g))
    partition = make_partition(config.noise, config.model.blocks)
    return LoadedRun(Path("."), config, config, None, stack.eval().requires_grad_(False), partition)  # type: ignore[arg-type]


EVIDENCE_FREE = {**PAPER, "start": "zero", "readout": "evidence_free"}
VOTE = {**CLEAN, "input": "independent", "combine": "mean"}
OBJECTIVES = [CLEAN, PAPER, {**PAPER, "input": "upstream"}, VOTE, EVIDENCE_FREE, {**CLEAN, "private_layers": 1}, {**CLEAN, "input": "independent"}]
OBJECTIVES += [{**EVIDENCE_FREE, "combine": "mean"}, {**CLEAN, "combine": "mean", "span": 2}]
FLOAT32 = Settings("float32")


def texts(chain: Chain, *jobs: tuple[Plan, bytes], draft: Draft | None = None, counts: Counts | None = None) -> list[bytes]:
    """What several generations at once give."""

    async def one(plan: Plan, prompt: bytes) -> bytes:
        return b"".join([bytes(piece.ids) async for piece in generate(chain, plan, prompt, draft, counts)])

    async def together() -> list[bytes]:
        return await asyncio.gather(*(one(*job) for job in jobs))

    return asyncio.run(together())


def logits_of(chain: Chain, text: list[int], cuts: list[int], settings: Settings = FLOAT32) -> Tensor:
    """Logits at every position of a text that goes through in pieces."""

    async def go() -> Tensor:
        opened, parts = await chain.open(settings), []
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            parts.append(await opened.step(Step(start, 0, text[start:stop])))
        return torch.cat(parts)

    return asyncio.run(go())


@pytest.mark.parametrize("model", [{"short_conv": 0}, {"short_conv": 3}, {"heads": 1, "attention_ratio": 0.5}, {"block_heads": True}])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_served_logits_are_those_of_evaluation_and_do_not_depend_on_the_pieces(objective: dict[str, Any], model: dict[str, Any]):
    run = made_run(objective, model=model)
    text = list(b"the quick brown fox jumps over")
    composer = Composer(run.stack, run.config, run.partition)
    with torch.no_grad():
        *_, whole = composer.sweep(torch.tensor([text]), composer.start((1, len(text)), run.config.seed))
    chain = LocalChain(run)
    pieces = [logits_of(chain, text, cuts) for cuts in (list(range(1, 30)), [], [7, 8, 21], [16])]
    assert torch.allclose(pieces[0], whole[0].float(), atol=1e-3)
    assert all(torch.equal(pieces[0], other) for other in pieces[1:])


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("objective", OBJECTIVES[:4])
def test_the_blocks_give_the_same_bits_however_they_are_spread(wire: str, objective: dict[str, Any]):
    run = made_run(objective)
    text, settings = list(b"spread over hosts"), Settings(wire)  # type: ignore[arg-type]
    together = logits_of(LocalChain(run), text, [5], settings)
    first, rest = BlockRunner(run, 0, 1), BlockRunner(run, 1, 3)
    memories, parts = (TextMemory(), TextMemory()), []
    for start, stop in ((0, 5), (5, len(text))):
        handed = first.run([Job(memories[0], settings, start, 0, text[start:stop], 0)])[0]
        given = rest.run([Job(memories[1], settings, start, 0, text[start:stop], 1, handed.state, handed.z, handed.votes)])[0]
        assert given.logits is not None
        parts.append(given.logits)
    assert torch.equal(torch.cat(parts), together)


def test_a_text_gives_the_same_bytes_alone_and_beside_others():
    chain = LocalChain(made_run(CLEAN, model={"short_conv": 2}))
    jobs = [(Plan(sampling=Sampling(1.0, seed=n), max_bytes=60), b"once upon" * (n % 4 + 1)) for n in range(12)]
    alone = [texts(chain, job)[0] for job in jobs]
    assert texts(chain, *jobs) == alone
    assert len(set(alone)) == 12
    assert len(alone[0]) == 60  # twice the 32 positions of the model


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("objective", [CLEAN, PAPER, {**CLEAN, "private_layers": 1}, {**CLEAN, "input": "independent"}, VOTE])
@pytest.mark.parametrize("draft_length", [None, 1, 7])
def test_speculative_gives_the_bytes_of_exact(temperature: float, objective: dict[str, Any], draft_length: int | None):
    run = made_run(objective, model={"short_conv": 3 if objective in (CLEAN, VOTE) else 0})
    chain, own = LocalChain(run), OwnDraft(run)
    for seed, prompt in enumerate([b"", b"a", b"thirty-two positions hold this..", b"and a prompt that is longer than the model remembers"]):
        sampling = Sampling(temperature, seed=seed)
        (wanted,) = texts(chain, (Plan("exact", sampling, 50), prompt))
        counts = Counts()
        (got,) = texts(chain, (Plan("speculative", sampling, 50, draft_length=draft_length), prompt), draft=own, counts=counts)
        assert got == wanted
        assert counts.bytes == 50 and counts.drafted > 0
        assert counts.traversals == 50 - counts.accepted


def test_another_run_may_draft_even_one_with_fewer_positions():
    run, small = made_run(CLEAN), made_run(CLEAN, model={"positions": 12, "width": 16, "blocks": 2})
    for draft in (OtherDraft(small), OtherDraft(run)):
        counts, sampling = Counts(), Sampling(1.0, seed=5)
        (wanted,) = texts(LocalChain(run), (Plan("exact", sampling, 70), b"so it goes"))
        assert texts(LocalChain(run), (Plan("speculative", sampling, 70, draft_length=4), b"so it goes"), draft=draft, counts=counts) == [wanted]
    assert counts.acceptance == 1.0, "a run that drafts for itself is always right"
    assert counts.traversals <= -(-70 // 5) + 2


def test_the_states_of_a_draft_are_handed_on_and_nothing_is_computed_twice(monkeypatch: pytest.MonkeyPatch):
    run = made_run(CLEAN)
    chain, own = LocalChain(run), OwnDraft(run)
    entered = []
    real = BlockRunner.run

    def watch(self: BlockRunner, jobs: list[Job]) -> Any:
        entered.extend((self.stop, job.enter, job.keep, len(job.ids)) for job in jobs)
        return real(self, jobs)

    monkeypatch.setattr(BlockRunner, "run", watch)
    counts = Counts()
    texts(chain, (Plan("speculative", max_bytes=20, draft_length=3), b"x"), draft=own, counts=counts)
    assert counts.accepted > 0
    assert {enter for stop, enter, _, _ in entered if stop == 3} == {1}, "block 0 runs where the draft is made, and only there"
    assert sum(t for stop, _, _, t in entered if stop == 1) == 1 + counts.drafted + counts.traversals - 1


@pytest.mark.parametrize("objective", [{**PAPER, "input": "upstream", "anchor_weight": 1.0, "window": 4}, {**VOTE, "window": 4}])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_sweep_gives_a_window_a_traversal_and_of_one_byte_is_exact(width: int, objective: dict[str, Any]):
    run = made_run(objective)
    chain, counts, sampling = LocalChain(run), Counts(), Sampling(1.0, seed=1)
    (got,) = texts(chain, (Plan("sweep", sampling, 75, window=width), b"start here"), counts=counts)
    assert len(got) == 75
    (wanted,) = texts(chain, (Plan("exact", sampling, 75), b"start here"))
    assert (got == wanted) == (width == 1)
    assert counts.traversals <= -(-75 // width) + 75 // 16  # where the window is full, a traversal gives less
    assert texts(chain, (Plan("sweep", sampling, 75, window=width), b"start here")) == [got]


def test_a_sweep_of_a_run_without_a_window_is_refused():
    with pytest.raises(ConfigError, match=r"objective\.window"):
        texts(LocalChain(made_run(CLEAN)), (Plan("sweep", window=8), b"x"))
    with pytest.raises(ConfigError, match="read-out"):
        OwnDraft(made_run({**CLEAN, "span": 3}))


def test_a_seed_fixes_the_text_and_another_gives_another():
    chain = LocalChain(made_run(CLEAN))
    a, b, c = texts(chain, *((Plan(sampling=Sampling(1.0, seed=seed), max_bytes=50), b"once") for seed in (3, 3, 4)))
    assert a == b != c


@pytest.mark.parametrize("skip", [(0,), (1,), (2,), (0, 1)])
@pytest.mark.parametrize("objective", [CLEAN, PAPER, {**PAPER, "input": "upstream"}])
def test_a_chain_without_some_blocks_still_answers(skip: tuple[int, ...], objective: dict[str, Any]):
    chain = LocalChain(made_run(objective))
    whole, without = (logits_of(chain, list(b"so it goes"), [4], Settings("bfloat16", s)) for s in ((), skip))
    assert bool(without.isfinite().all()) and not torch.allclose(whole, without)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4])
def test_tiny_temperatures_are_greedy(temperature: float):
    logits = torch.randn(256, generator=torch.Generator().manual_seed(0))
    assert all(pick(logits, Sampling(temperature), position) == int(logits.argmax()) for position in range(50))


def test_samples_follow_the_distribution_and_top_p_cuts_its_tail():
    logits = torch.full((256,), -torch.inf)
    logits[:4] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = torch.tensor([pick(logits, Sampling(1.0, 1.0, 1), position) for position in range(4000)]).bincount(minlength=256) / 4000
    assert torch.allclose(drawn[:4], torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.03)
    assert {pick(logits, Sampling(1.0, 0.7, 1), position) for position in range(300)} == {0, 1}
    assert {pick(logits, Sampling(1.0, 1e-9, 1), position) for position in range(50)} == {0}


@pytest.mark.parametrize(
    ("field", "settings"), [("temperature", {"temperature": -1.0}), ("temperature", {"temperature": float("nan")}), ("top_p", {"top_p": 0.0})]
)
def test_bad_sampling_names_the_setting(field: str, settings: dict[str, Any]):
    with pytest.raises(ConfigError, match=field):
        Sampling(**settings)


def test_int8_rows_are_within_half_a_step_and_zeros_stay():
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 50)[:, None]
    x[3] = 0
    rounded = round_as_sent(x, "int8")
    assert torch.equal(rounded[3], x[3])
    assert bool(((rounded - x).abs() <= x.abs().amax(1, keepdim=True) / 254 * 1.001).all())
