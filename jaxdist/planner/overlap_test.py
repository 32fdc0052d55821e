"""Facts read from a scheduled program."""

from jaxdist.planner.overlap import Overlap, overlaps

# In XLA's format for GPUs, with parts of each line left out.
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%gemm_fusion_dot_computation (p: bf16[8,8]) -> bf16[8,8] {
  ROOT %dot.1 = bf16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}
}

%block (p.0: (bf16[2,8], f32[8,8])) -> (bf16[2,8], f32[8,8]) {
  %all-gather-start = ((bf16[2,8]{1,0}, bf16[2,8]{1,0}), (bf16[8,8]{1,0}, bf16[8,8]{1,0})) all-gather-start(%a, %b)
  %gemm_fusion_dot.1 = bf16[8,8]{1,0} fusion(%x), kind=kCustom, calls=%gemm_fusion_dot_computation
  %loop_multiply_fusion = bf16[8,8]{1,0} fusion(%x), kind=kLoop, metadata={op_name="a gemm is not this"}
  %all-gather-done = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) all-gather-done(%all-gather-start)
  %reduce-scatter-start = (f32[8,8]{1,0}, f32[2,8]{1,0}) reduce-scatter-start(%g), to_apply=%add
  %custom-call.7 = (bf16[8,8]{1,0}, s8[4]{0}) custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"
  %copy.1 = f32[8,8]{1,0} copy(%g)
  ROOT %reduce-scatter-done = f32[2,8]{1,0} reduce-scatter-done(%reduce-scatter-start)
}

ENTRY %main (p.1: f32[8]) -> f32[8] {
  %while.1 = (bf16[2,8]{1,0}, f32[8,8]{1,0}) while(%t), condition=%more, body=%block
  %all-reduce-start = f32[8]{0} all-reduce-start(%p.1), to_apply=%add
  %constant.1 = s32[] constant(0)
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  ROOT %all-to-all.1 = (f32[8]{0}, f32[8]{0}) all-to-all(%u, %v)
}
"""


def test_kernels_that_overlap_each_collective() -> None:
    """Kernels between start and end, and products among them: a fusion around one, cuDNN's attention; inside loops or
    not."""
    assert overlaps(PROGRAM) == [
        Overlap("all-gather", "bf16", 2, looped=True, beside=2, products=1),
        Overlap("reduce-scatter", "f32", 1, looped=True, beside=2, products=1),
        Overlap("all-reduce", "f32", 1, looped=False, beside=0, products=0),
        Overlap("all-to-all", "f32", 2, looped=False, beside=0, products=0),
    ]


def test_a_collective_that_is_awaited_at_once() -> None:
    """The same program with the end right after the start: nothing overlaps."""
    lines = PROGRAM.splitlines()
    end = next(line for line in lines if "all-gather-done(" in line)
    lines.remove(end)
    lines.insert(1 + next(i for i, line in enumerate(lines) if "all-gather-start(" in line), end)
    assert overlaps("\n".join(lines))[0] == Overlap("all-gather", "bf16", 2, looped=True, beside=0, products=0)
