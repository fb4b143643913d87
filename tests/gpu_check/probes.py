"""Parts of Backhaul by themselves, without a worker: settings, digests, copies between host and device, durations."""

import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from backhaul_runtime.program.codec import decode_state, encode_state
from backhaul_runtime.tensors.digest import device_sums, torch_sums
from backhaul_runtime.tensors.durations import wait_s
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.tensors.staging import device_moments, host_pieces, to_device, wait_for
from backhaul_runtime.tensors.stopwatch import Stopwatch
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.cuda_libraries import library_versions
from backhaul_runtime.torch_internals.generators import default_generator
from gpu_check.results import DEVICE, IS_REAL, ON_GPU, clocked, guarded, note, sized, synchronize

SHARE_OF_COPY = 0.6
LARGEST_TEMPORARY = 1 << 20
MOST_LAUNCHES = 2
CHUNK = 1 << 20
EVENT_RESOLUTION_S = 1e-6
LIBRARIES = {"driver", "cudnn", "cublas", "cublaslt"}
"""Whose versions tell one GPU's results from those of another of the same model."""


def settings() -> None:
    """The device, and torch's settings as Backhaul sends them."""
    facts: dict[str, object] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": torch.cuda.device_count(),
    }
    if ON_GPU:
        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    note("facts", True, **facts)
    if IS_REAL:
        torch.ones(2, 2, device=DEVICE).mm(torch.ones(2, 2, device=DEVICE))  # loads cuBLAS
        versions = library_versions()
        note("the versions of the driver and the libraries are known", versions.keys() >= LIBRARIES, **versions)
    state = ambient_state.capture()
    note("settings survive their message", decode_state(encode_state(state)) == state)
    for name, setting in ambient_state.settings().items():
        with guarded(f"the setting {name} can be written as it was read"):
            setting.write(setting.read())
    with guarded("a multiplication works after TF32 was applied by a worker"):
        before = ambient_state.capture()
        torch.backends.cuda.matmul.allow_tf32 = True
        recorded = ambient_state.capture()
        torch.backends.cuda.matmul.allow_tf32 = False
        ambient_state.apply(recorded, ambient_state.capture())
        a = torch.randn(64, 64, device=DEVICE)
        (a @ a).sum().item()
        allowed = torch.backends.cuda.matmul.allow_tf32
        ambient_state.apply(before, ambient_state.capture())
        ok = allowed or not ON_GPU  # only programs that use CUDA have this setting
        note("a multiplication works after TF32 was applied by a worker", ok)
    order = torch._C._get_sdp_priority_order()
    q = torch.randn(1, 4, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(q, q, q)
    after = torch._C._get_sdp_priority_order()
    note("attention's backends keep their order once it is read", order == after, before=order, after=after)
    if ON_GPU:
        with guarded("a generator's state draws the same again"):
            generator, x = default_generator(torch.device(DEVICE)), torch.ones(1 << 16, device=DEVICE)
            drawn_from = generator.get_state()
            first = F.dropout(x, 0.3)
            generator.set_state(drawn_from.clone())
            note("a generator's state draws the same again", torch.equal(first, F.dropout(x, 0.3)))


def digest() -> None:
    """One pass, few launches, no temporary memory, no wait."""
    data = torch.randint(0, 255, (sized(64 << 20, 1 << 20),), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(data)
    copy_ms, digest_ms = clocked(lambda: target.copy_(data), 10), clocked(lambda: device_sums(data), 10)
    share = copy_ms / 2 / digest_ms  # a copy reads and writes
    met = {"met": share >= SHARE_OF_COPY} if IS_REAL else {}
    rate = round(data.nbytes / digest_ms / 1e6, 1)
    note(
        f"a digest has {SHARE_OF_COPY:.0%} of the bandwidth of a copy",
        met.get("met"),
        share=round(share, 2),
        GB_per_s=rate,
        MB=round(data.nbytes / 1e6, 1),
    )
    if not ON_GPU:
        return
    for begin in (0, 1):
        part = data[begin : (1 << 20) + 3]
        same = torch.equal(device_sums(part).cpu(), torch_sums(part.cpu()))
        note(f"a digest has the sums of the host, from byte {begin} on", same)
    for size in (1, 4096, 1 << 20, data.numel()) if IS_REAL else ():
        with guarded(f"a digest of {size} bytes takes at most {MOST_LAUNCHES} launches"):
            launches = launches_of(data[:size])
            ok = launches <= MOST_LAUNCHES
            note(f"a digest of {size} bytes takes at most {MOST_LAUNCHES} launches", ok, launches=launches)
    if IS_REAL:
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        device_sums(data)
        temporary = torch.cuda.max_memory_allocated() - base
        note("a digest takes no memory", temporary <= LARGEST_TEMPORARY, temporary_bytes=temporary)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with guarded("a digest waits for nothing"):
            device_sums(data)
            note("a digest waits for nothing", True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def launches_of(data: torch.Tensor) -> int:
    """Kernels, fills and copies on the device during a digest."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        device_sums(data)
        synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiled.events())


def read_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields a tensor's bytes in pieces on the host, each once it is complete."""
    for piece, complete in host_pieces(tensor, layout_of(tensor), device_moments([tensor])):
        wait_for(complete)
        yield piece


def staging() -> None:
    """Copies between host and device, as uploads and downloads make them."""
    source = torch.randint(0, 255, (sized(256 << 20, 4 << 20),), dtype=torch.uint8, device=DEVICE)
    pieces = list(read_pieces(source))
    note(
        "what is read from the device is what is there",
        torch.equal(torch.cat([piece.clone() for piece in pieces]), source.cpu())
        if len(pieces) == 1 or not ON_GPU
        else None,
    )

    def down() -> None:
        for _ in read_pieces(source):
            pass

    note("copies to the host", None, GB_per_s=rate_of(down, source.nbytes))
    if not ON_GPU:
        return
    target, chunk = torch.empty_like(source), bytes(range(256)) * (CHUNK // 256)

    def up() -> None:
        for start in range(0, source.nbytes, CHUNK):
            to_device(chunk, target[start : start + CHUNK])

    note("copies to the device", None, GB_per_s=rate_of(up, source.nbytes))
    expected = torch.frombuffer(bytearray(chunk), dtype=torch.uint8).repeat(source.nbytes // CHUNK)
    note("what is written to the device is what was sent", torch.equal(target.cpu(), expected))


def rate_of(function: object, size: int) -> float:
    """Gigabytes each second of a copy that the host waits for."""
    assert callable(function)
    function()
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return round(size / (time.perf_counter() - began) / 1e9, 2)


def durations() -> None:
    """Durations by events: positive, and no longer than the host's time around a synchronisation before and after."""
    if not ON_GPU:
        note("skipped: only a device has durations by events")
        return
    side = sized(2048, 128)
    a = torch.randn(side, side, device=DEVICE)
    for where, stream in {
        "the usual stream": torch.cuda.current_stream(),
        "another stream": torch.cuda.Stream(),
    }.items():
        what = f"work on {where} takes some time, at most the host's"
        with guarded(what), torch.cuda.stream(stream):
            synchronize()
            began_s = time.perf_counter()
            stopwatch = Stopwatch(a.device)
            for _ in range(20):
                a = (a @ a).tanh()
            duration = stopwatch.stop()
            synchronize()
            host_s = time.perf_counter() - began_s
            device_s = wait_s(duration)
            ok = 0 < device_s <= host_s + EVENT_RESOLUTION_S
            note(what, ok, device_ms=round(device_s * 1e3, 3), host_ms=round(host_s * 1e3, 3))
