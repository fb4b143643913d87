"""A hivemind server with one expert and its client. They run in a Python that has hivemind but not Backhaul.

    python hivemind_side.py server MODEL_FILE
        prints the address of the server
    python hivemind_side.py client MODEL_FILE ADDRESS
        prints a line, then for each line on stdin the seconds of a backward and the digest of the input's gradient

MODEL_FILE is backhaul/demo/model.py, which imports only torch.
"""

import hashlib
import importlib.util
import sys
from time import perf_counter
from typing import Any

import torch

WIDTH, TOKENS = 512, (4, 256)
SEED = 0
EXPERT = "block.0"


def block_of(model_file: str) -> torch.nn.Module:
    """Returns the block, with weights that are the same for the server, the client and Backhaul."""
    spec = importlib.util.spec_from_file_location("model", model_file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(SEED)
    block: torch.nn.Module = module.Block(WIDTH, dropout=0.0)
    return block.requires_grad_(False)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input and the gradient of the output, which are the same in all processes."""
    torch.manual_seed(SEED + 1)
    return torch.randn(*TOKENS, WIDTH, requires_grad=True), torch.randn(*TOKENS, WIDTH)


def digest(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes, in hexadecimal."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def serve(model_file: str) -> None:
    """Hosts the block until stdin is closed."""
    from hivemind import DHT
    from hivemind.moe.server import ModuleBackend, Server
    from hivemind.utils.tensor_descr import BatchTensorDescriptor

    dht = DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    shape = BatchTensorDescriptor(*TOKENS[1:], WIDTH)
    expert = ModuleBackend(EXPERT, block_of(model_file), args_schema=(shape,), outputs_schema=shape, max_batch_size=64)
    server = Server(dht, {EXPERT: expert}, num_connection_handlers=1, device=torch.device("cpu"), start=True)
    print(dht.get_visible_maddrs()[0], flush=True)
    sys.stdin.read()
    server.shutdown()
    dht.shutdown()


def call(address: str) -> None:
    """Runs a backward for each line on stdin."""
    from hivemind import DHT
    from hivemind.moe.client.expert import RemoteExpert, create_remote_experts
    from hivemind.moe.expert_uid import ExpertInfo
    from hivemind.p2p import PeerID

    dht = DHT(initial_peers=[address], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    peer = PeerID.from_base58(address.rpartition("/")[2])
    expert: RemoteExpert = create_remote_experts([ExpertInfo(EXPERT, peer)], dht)[0]
    x, gradient = tensors()
    print("ready", expert.info is not None, flush=True)
    for _ in sys.stdin:
        x.grad = None
        y: Any = expert(x)
        began_s = perf_counter()
        y.backward(gradient)
        taken_s = perf_counter() - began_s
        assert x.grad is not None
        print(taken_s, digest(x.grad), flush=True)
    dht.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "server":
        serve(sys.argv[2])
    else:
        call(sys.argv[3])
