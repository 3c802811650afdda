"""An id of NCCL as trainers that drive vLLM lay it into a store: bytes that Python writes for such
a structure, here as literals around the 128 that matter. They are opcodes of a format that nothing
of ours reads or writes otherwise.
"""

from __future__ import annotations

NAMES = (
    b"_ctypes",
    b"_unpickle",
    b"vllm.distributed.device_communicators.pynccl_wrapper",
    b"ncclUniqueId",
)
FRAME_BYTES = 0xEC  # after its length
FRAMED = (
    b"\x95"
    + FRAME_BYTES.to_bytes(8, "little")
    + b"".join(
        b"\x8c%c%b\x94" % (len(name), name) + (b"\x93\x94" if i % 2 else b"")
        for i, name in enumerate(NAMES)
    )
    + b"}\x94C\x80"
)
AROUND = {  # protocol -> what comes before the id, and after it
    3: (
        b"\x80\x03c%b\n%b\nq\x00c%b\n%b\nq\x01}q\x02C\x80" % NAMES,
        b"q\x03\x86q\x04\x86q\x05Rq\x06.",
    ),
    4: (b"\x80\x04" + FRAMED, b"\x94\x86\x94\x86\x94R\x94."),
    5: (b"\x80\x05" + FRAMED, b"\x94\x86\x94\x86\x94R\x94."),
}


def written(id: bytes, protocol: int = 4) -> bytes:
    before, after = AROUND[protocol]
    assert len(id) == 128
    return before + id + after
