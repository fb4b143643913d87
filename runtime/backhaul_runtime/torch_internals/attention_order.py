"""The order in which torch tries the backends of attention on CUDA."""

import threading

import torch

_lock = threading.Lock()
_is_decided = False


def attention_order() -> tuple[int, ...]:
    """Returns the order, as the numbers of `torch.nn.attention.SDPBackend`.

    On some GPUs torch puts cuDNN first, and it does so inside the first attention of a process. An order that was read
    before would be another one than the attention has used. So once CUDA is initialised this makes torch decide, before
    it reads. It never initialises CUDA.
    """
    if not _is_decided and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _decide()
    return tuple(torch._C._get_sdp_priority_order())


def _decide() -> None:
    global _is_decided
    with _lock:
        if _is_decided:
            return
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            query = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
            torch._fused_sdp_choice(query, query, query)  # chooses a backend and runs none
        _is_decided = True
