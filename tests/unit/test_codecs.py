"""Update codecs: what comes back, at which size, and that two machines hold the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from blocktrain.codecs import CODECS, Codec, apply_delta, encode_update, max_encoded_bytes, read_update
from blocktrain.errors import ProtocolError
from blocktrain.serialization import tensor_digest

SHAPES = {"layers.0.weight": (64, 96), "layers.0.gain": (96,), "odd": (3, 7, 13), "single": (), "none": (0, 4)}


def make_tensors(seed: int = 0, scale: float = 1e-3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def decoded(data: bytes) -> dict[str, Tensor]:
    return dict(read_update(data, SHAPES).tensors())


@pytest.mark.parametrize(("codec", "error"), [("fp32", 0.0), ("bf16", 2e-3), ("int8", 7.5e-3)])
def test_what_comes_back_is_what_was_sent_up_to_the_codecs_error(codec: Codec, error: float):
    sent, received = make_tensors(), decoded(encode_update(make_tensors().items(), codec).data)
    assert {name: t.shape for name, t in received.items()} == {name: t.shape for name, t in sent.items()}
    assert all(t.dtype == torch.float32 for t in received.values())
    name = "layers.0.weight"
    assert float((received[name] - sent[name]).norm() / sent[name].norm()) <= error


@pytest.mark.parametrize(("codec", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 65 / 256)])
def test_size_against_float32(codec: Codec, share: float):
    weights = {"w": torch.randn(512, 1024)}
    size = len(encode_update(weights.items(), codec).data)
    assert size / (4 * 512 * 1024) == pytest.approx(share, abs=2e-4)
    assert size <= max_encoded_bytes({"w": (512, 1024)}, codec)


@pytest.mark.parametrize("codec", CODECS)
def test_same_tensors_same_bytes_in_any_order(codec: Codec):
    tensors = make_tensors()
    assert encode_update(tensors.items(), codec).data == encode_update(reversed(tensors.items()), codec).data


@pytest.mark.parametrize("codec", CODECS)
def test_the_file_is_a_safetensors_file(codec: Codec):
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
    parts = load(encode_update(make_tensors().items(), codec).data)
    assert parts.keys() == SHAPES.keys() | ({f"{name}:scale" for name in SHAPES} if codec == "int8" else set())
    assert all(parts[name].dtype == kinds[codec] and parts[name].shape == shape for name, shape in SHAPES.items())


def test_golden_bytes_of_int8():
    """The format, byte for byte: a header of JSON padded with spaces, then each tensor's values and its scales."""
    data = encode_update([("w", torch.tensor([0.0, 127.0, -63.5, 1.0]))], "int8").data
    header = (
        b'{"__metadata__":{"blocktrain":"update/1 int8"},'
        b'"w":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"w:scale":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
    )
    header += b" " * (-len(header) % 8)
    assert data == len(header).to_bytes(8, "little") + header + bytes([0, 127, 256 - 64, 1]) + b"\x00\x00\x80\x3f"


def test_int8_is_exact_on_its_own_grid_and_within_half_a_step_elsewhere():
    grid = torch.arange(-127, 128).float() * 2**-10
    assert torch.equal(dict(read_update(encode_update([("g", grid)], "int8").data, {"g": (255,)}).tensors())["g"], grid)
    x = torch.randn(1000)
    back = read_update(encode_update([("x", x)], "int8").data, {"x": (1000,)}).tensor("x")
    for begin in range(0, 1000, 256):
        group = slice(begin, begin + 256)
        assert float((back[group] - x[group]).abs().max()) <= float(x[group].abs().max()) / 127 * 0.501


@pytest.mark.parametrize("values", [[0.0] * 300, [1e-45] * 300, [1e-38, 3e38], [-3.3e38, 0.0]])
def test_extreme_groups_come_back_finite(values: list[float]):
    back = read_update(encode_update([("x", torch.tensor(values))], "int8").data, {"x": (len(values),)}).tensor("x")
    assert bool(torch.isfinite(back).all())
    assert torch.allclose(back, torch.tensor(values), rtol=1e-6, atol=2e-38)


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_residual_is_what_was_left_out(codec: Codec):
    tensors = make_tensors()
    encoded = encode_update(tensors.items(), codec)
    received = decoded(encoded.data)
    for name, tensor in tensors.items():
        assert torch.equal(encoded.residual[name], tensor - received[name])
    assert encode_update(tensors.items(), "fp32").residual == {}


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_error_feedback_keeps_the_sum_of_updates(codec: Codec):
    """After 40 updates the sum received is off by one update's rounding, not by forty; small values next to large ones get through."""
    true, plain, fed = torch.zeros(256), torch.zeros(256), torch.zeros(256)
    residual: dict[str, Tensor] = {}
    for step in range(40):
        delta = 1e-3 * torch.rand(256, generator=torch.Generator().manual_seed(step))
        delta[0] = 1.0
        true += delta
        encoded = encode_update([("w", delta)], codec, residual)
        residual = encoded.residual
        fed += read_update(encoded.data, {"w": (256,)}).tensor("w")
        plain += read_update(encode_update([("w", delta)], codec).data, {"w": (256,)}).tensor("w")
    one_rounding = 1.0 / 127 / 2 * 1.01 if codec == "int8" else 1e-5
    assert float((true - fed).abs()[1:].max()) <= one_rounding
    assert float((true - fed)[1:].norm()) < 0.5 * float((true - plain)[1:].norm())


@pytest.mark.parametrize("codec", CODECS)
def test_sender_and_receiver_hold_the_same_bits_after_many_versions(codec: Codec):
    """The sender takes v + 1 from the bytes it publishes; its residual brings what was rounded away into v + 2."""
    g = torch.Generator().manual_seed(7)
    exact = make_tensors(1, scale=0.1)
    published = {name: tensor.clone() for name, tensor in exact.items()}
    receiver = {name: tensor.clone() for name, tensor in exact.items()}
    residual: dict[str, Tensor] = {}
    for _ in range(12):
        step = {name: 1e-3 * torch.randn(tensor.shape, generator=g) for name, tensor in exact.items()}
        exact = {name: tensor + step[name] for name, tensor in exact.items()}
        encoded = encode_update(step.items(), codec, residual)
        residual = encoded.residual
        published = dict(apply_delta(published.__getitem__, read_update(encoded.data, SHAPES)))
        receiver = dict(apply_delta(receiver.__getitem__, read_update(bytes(encoded.data), SHAPES)))
        assert tensor_digest(published) == tensor_digest(receiver)
    name = "layers.0.weight"
    assert float((published[name] - exact[name]).abs().max()) < 5e-5  # one rounding of a step of 1e-3, however many versions


def test_a_delta_keeps_the_dtype_of_the_base():
    update = read_update(encode_update([("w", torch.full((4,), 0.5))], "fp32").data, {"w": (4,)})
    assert dict(apply_delta(lambda _: torch.ones(4, dtype=torch.bfloat16), update))["w"].dtype == torch.bfloat16


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_sent(codec: Codec, bad: float):
    with pytest.raises(ProtocolError, match=r"layers\.1\.weight"):
        encode_update([("layers.1.weight", torch.tensor([1.0, bad]))], codec)


def test_beyond_the_range_of_the_codec_is_not_sent():
    with pytest.raises(ProtocolError, match="tensor w"):
        encode_update([("w", torch.tensor([3.4e38]))], "bf16")
    with pytest.raises(ProtocolError, match="tensor w"):
        encode_update([("w", torch.tensor([3.4e38]))], "int8")


@pytest.mark.parametrize("names", [[""], ["__metadata__"], ["a:scale"], ["a", "a"]])
def test_names_that_would_be_ambiguous_are_not_sent(names: list[str]):
    with pytest.raises(ProtocolError, match="under this name"):
        encode_update([(name, torch.zeros(2)) for name in names], "int8")


def test_a_codec_that_a_run_does_not_allow_is_refused_with_both_values():
    data = encode_update(make_tensors().items(), "int8").data
    with pytest.raises(ProtocolError, match=r"update/1 int8.*CODEC of fp32, bf16"):
        read_update(data, SHAPES, allowed=("fp32", "bf16"))
    with pytest.raises(ProtocolError, match="update/2"):
        read_update(data.replace(b"update/1", b"update/2"), SHAPES)


def test_names_of_any_alphabet_fit_the_size_limit():
    shapes = {f"{chr(0x1F600)}\n{i}": (1,) for i in range(20)}
    for codec in CODECS:
        data = encode_update([(name, torch.ones(1)) for name in shapes], codec).data
        assert len(data) <= max_encoded_bytes(shapes, codec)
        assert read_update(data, shapes).codec == codec
