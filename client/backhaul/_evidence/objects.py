"""Objects of a directory of evidence: bytes that files of it name by their digests, such as elements of tensors."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from backhaul._evidence.files import Bytes, UnusableError, object_of
from backhaul_runtime.tensors.digest import content_digest, tensor_address, weighted_sums
from backhaul_runtime.tensors.layout import Layout, from_payload, host_bytes, payload


@dataclass(slots=True, eq=False)
class Objects:
    """Objects that are written together.

    Attributes:
        contents: The bytes of each object, by its digest.
    """

    contents: dict[bytes, Bytes] = field(default_factory=dict)
    _owners: list[Tensor] = field(default_factory=list)  # of the memory that `contents` shows

    def add(self, content: Bytes) -> bytes:
        """Adds an object. Returns its digest, 32 bytes."""
        digest = object_of(content)
        self.contents[digest] = content
        return digest

    def add_tensor(self, tensor: Tensor, layout: Layout, address: bytes = b"") -> bytes:
        """Adds the elements of a tensor. Returns the digest of the object.

        Args:
            tensor: A tensor on the host, which must not change until the objects were written.
            layout: The layout that the tensor had in forward, perhaps on an accelerator.
            address: The address that it must have; empty for any.

        Raises:
            UnusableError: It has another address.
        """
        data = payload(tensor.detach(), layout)
        if address:
            content = weighted_sums(data) if layout.is_on_accelerator else content_digest(tensor, layout)
            if tensor_address(layout, content) != address:
                raise UnusableError(
                    f"a captured tensor of shape {list(layout.shape)} was changed before it was written"
                )
        self._owners.append(data)
        return self.add(host_bytes(data) if layout.payload_bytes else b"")


def tensor_of(content: bytes, layout: Layout, device: torch.device) -> Tensor:
    """Returns a tensor from the bytes of an object.

    Args:
        content: The elements in memory order, `payload_bytes` of the layout.
        layout: The layout of the tensor.
        device: The device for tensors of an accelerator. Those of the host stay there.
    """
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return from_payload(data.to(device) if layout.is_on_accelerator else data, layout)
