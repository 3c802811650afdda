"""silu(x) = x / (1 + e^-x) in five instructions, called by every kernel that multiplies a gate, in
Triton and in Gluon alike.

It is PTX text because no two compilers turn the formula into the same instructions. So the same x
gives the same bits in every kernel. The interpreter, which has no PTX, computes the formula.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tlt_kernels.gpu.target import INTERPRETED

# x * rcp(1 + 2^(-x log2 e)); 0fBFB8AA3B is -log2 e. Where e^-x overflows the reciprocal is 0 and
# the result -0.
_PTX = tl.constexpr("""{
.reg .f32 t;
mul.f32 t, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 t, t;
add.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 t, t;
mul.f32 $0, $1, t;
}""")


@triton.jit
def silu(x):
    """Return silu of x in float32, of any shape. The relative error is at most (|x| + 5) 2^-23 down
    to x = -87; below that the result is 0 or almost.
    """
    if INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    return tl.inline_asm_elementwise(_PTX, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
