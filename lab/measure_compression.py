"""Measures how well changes of weights, and gradients, can be compressed while a tiny Llama is fine-tuned.

    python lab/measure_compression.py [--json FILE] [--pretrain 200] [--steps 20]

The model has 3.4 million parameters and reads bytes. It is trained from random weights on this project's documentation
with AdamW at 1e-3, because no pretrained model can be had offline, and then fine-tuned on the same text with AdamW at
1e-5 and at 1e-4. The last three steps of fine-tuning are measured: the change of each weight as it is sent to workers,
and each gradient as workers would send it. All times are CPU times of one thread.
"""

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from backhaul_lab.harness.machine import describe
from backhaul_runtime.tensors.differences import BLOCK_BYTES, LEVEL, BlockDecoder, BlockEncoder

LENGTH, BATCH, MEASURED_STEPS = 128, 8, 3
RATES = (1e-5, 1e-4)
Bytes = NDArray[np.uint8]
Encode = Callable[[Bytes, Bytes, int], bytes]
Decode = Callable[[bytes, Bytes, int], Bytes]
Codec = tuple[Encode, Decode]


def text() -> Tensor:
    """Returns the project's documentation as int64 [bytes]."""
    files = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)))


def tiny_llama() -> Any:
    """Returns a Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * LENGTH,
    )
    return LlamaForCausalLM(config)


def train(model: Any, data: Tensor, rate: float, steps: int, generator: torch.Generator) -> Iterator[float]:
    """Trains with AdamW. Yields the loss of each step before its optimizer step, while the gradients are there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=generator)
        tokens = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        yield loss.item()
        optimizer.step()


def bytes_of(tensor: Tensor) -> Bytes:
    """Returns the bytes of a contiguous tensor, as a copy."""
    return tensor.detach().contiguous().clone().view(torch.uint8).reshape(-1).numpy()


def measured(pairs: Iterable[tuple[Bytes, Bytes]], width: int, encode: Encode, decode: Decode) -> dict[str, float]:
    """Encodes new bytes beside old ones, block by block. Returns the ratio of sizes, and the rates in MB/s."""
    size = encoded = 0
    encode_s = decode_s = 0.0
    for now, before in pairs:
        for start in range(0, len(now), BLOCK_BYTES):
            new, old = now[start : start + BLOCK_BYTES], before[start : start + BLOCK_BYTES]
            times_s = [thread_time()]
            frame = encode(new, old, width)
            times_s.append(thread_time())
            decoded = decode(frame, old, width)
            times_s.append(thread_time())
            assert np.array_equal(decoded, new)
            encode_s += times_s[1] - times_s[0]
            decode_s += times_s[2] - times_s[1]
            size += len(new)
            encoded += len(frame)
    return {
        "ratio": round(size / encoded, 2),
        "encode_mb_per_s": round(size / encode_s / 1e6),
        "decode_mb_per_s": round(size / decode_s / 1e6),
    }


_compressor = zstandard.ZstdCompressor(level=LEVEL)
_decompressor = zstandard.ZstdDecompressor()


def _grouped(data: Bytes, width: int) -> bytes:
    return _compressor.compress(np.ascontiguousarray(data.reshape(-1, width).T).data)


def _ungrouped(frame: bytes, width: int) -> Bytes:
    planes = np.frombuffer(_decompressor.decompress(frame), np.uint8).reshape(width, -1)
    columns = np.empty(planes.shape[::-1], np.uint8)
    for position, plane in enumerate(planes):
        columns[:, position] = plane
    return columns.reshape(-1)


_encoder, _decoder = BlockEncoder(), BlockDecoder()
AS_SENT: Codec = (_encoder.encode, _decoder.decode)
XOR_GROUPED: Codec = (
    lambda now, before, width: _grouped(now ^ before, width),
    lambda frame, before, width: _ungrouped(frame, width) ^ before,
)
XOR: Codec = (
    lambda now, before, width: _grouped(now ^ before, 1),
    lambda frame, before, width: _ungrouped(frame, 1) ^ before,
)
GROUPED: Codec = (
    lambda now, before, width: _grouped(now, width),
    lambda frame, before, width: _ungrouped(frame, width),
)
"""Ways to encode a block and to decode it: the shipped one, the XOR with bytes grouped by position or in their order,
and the new bytes alone, grouped."""


def fine_tune(state: dict[str, Tensor], data: Tensor, rate: float, dtype: torch.dtype, steps: int) -> dict[str, Any]:
    """Fine-tunes a copy of the model. Returns the measured ratios of weights and gradients."""
    model = tiny_llama()
    model.load_state_dict(state)
    model.to(dtype)
    generator = torch.Generator().manual_seed(2)
    weights: list[list[Bytes]] = []
    gradients: list[list[Bytes]] = []
    for step, loss in enumerate(train(model, data, rate, steps, generator)):
        last = loss
        if step >= steps - MEASURED_STEPS - 1:
            weights.append([bytes_of(parameter) for parameter in model.parameters()])
            gradients.append([bytes_of(parameter.grad) for parameter in model.parameters()])

    def pairs(versions: list[list[Bytes]]) -> list[tuple[Bytes, Bytes]]:
        return [
            (now, before) for old, new in itertools.pairwise(versions) for now, before in zip(new, old, strict=True)
        ]

    width, changes = dtype.itemsize, pairs(weights)
    return {
        "loss": round(last, 3),
        "weights up": {
            "difference, as sent": measured(changes, width, *AS_SENT),
            "xor, grouped": measured(changes, width, *XOR_GROUPED),
            "xor": measured(changes, width, *XOR),
            "whole, grouped": measured(changes, width, *GROUPED),
        },
        "gradients down": {
            "difference": measured(pairs(gradients), width, *AS_SENT),
            "whole, grouped": measured(pairs(gradients), width, *GROUPED),
        },
    }


def main() -> None:
    """Trains, measures, prints the table and writes the results if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to a file")
    parser.add_argument("--pretrain", type=int, default=200, help="steps at 1e-3 before fine-tuning")
    parser.add_argument("--steps", type=int, default=20, help="steps of fine-tuning")
    arguments = parser.parse_args()
    data, model = text(), tiny_llama()
    for step, loss in enumerate(train(model, data, 1e-3, arguments.pretrain, torch.Generator().manual_seed(1))):
        if step % 50 == 0:
            print(f"pretraining, step {step}: loss {loss:.3f}", flush=True)
    results: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rate in RATES:
            name = f"{str(dtype).removeprefix('torch.')}, AdamW at {rate:g}"
            results[name] = fine_tune(model.state_dict(), data, rate, dtype, arguments.steps)
            print(name, json.dumps(results[name], indent=2), flush=True)
    if arguments.json is not None:
        document = {**describe(), "figures": {}, "compression": results}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
