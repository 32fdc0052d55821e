"""The precision section of an experiment: dtypes, by policy, and the loss scale that float16 needs."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from jaxdist.config.section import NUMBER, Count, NotNegative, Section

Dtype = Literal["float32", "bfloat16", "float16", "float64"]

POLICIES: dict[str, tuple[Dtype, Dtype, Dtype]] = {
    # policy: (parameters and optimizer state, compute, gradient reduction)
    "fp32": ("float32", "float32", "float32"),
    "bf16": ("float32", "bfloat16", "float32"),
    "fp16": ("float32", "float16", "float32"),
    "fp64": ("float64", "float64", "float64"),
    "O2": ("float32", "float16", "float16"),
    "bf16-true": ("bfloat16", "bfloat16", "bfloat16"),
    "16-true": ("float16", "float16", "float16"),
}

# Lightning's names and Apex's levels of the same.
NAMES = {
    "32-true": "fp32", "O0": "fp32", "16-mixed": "fp16", "O1": "fp16", "bf16-mixed": "bf16", "64-true": "fp64",
    "O3": "16-true",
}  # fmt: skip

_BY_POLICY: Any = Field(default=None)  # filled in before validation


class Precision(Section):
    """The dtypes, as FSDP2's MixedPrecisionPolicy names them, and the loss scale, as GradScaler does.

    Norms, softmax, rope and loss are never below float32.
    """

    policy: Literal["fp32", "bf16", "fp16", "fp64", "O2", "bf16-true", "16-true"] = "fp32"
    """Mixed-precision policy. fp32; bf16, fp16: compute in this dtype, with float32 master weights and gradient
    reduction; fp64: for proofs; O2: Apex's, fp16 with reduction in float16; bf16-true, 16-true: everything in this
    dtype. Lightning's names and Apex's levels are accepted too."""
    parameters: Dtype = _BY_POLICY
    """Dtype of master weights, gradients, their accumulators and optimizer state; unset: the policy's."""
    compute: Dtype = _BY_POLICY
    """Dtype of matrix products and activations; unset: the policy's."""
    reduce: Dtype = _BY_POLICY
    """Dtype in which gradients are reduced between devices; unset: the policy's."""
    loss_scale: NotNegative = _BY_POLICY
    """Initial loss scale: the loss is multiplied by it before the backward pass, and gradients are divided by it before
    the clip. 0: no scaling; unset: 65536 where float16 computes gradients of wider weights, else 0."""
    growth_factor: Annotated[float, NUMBER, Field(gt=1, allow_inf_nan=False)] = 2.0
    """Factor on the loss scale after `growth_interval` steps without an overflow."""
    backoff_factor: Annotated[float, NUMBER, Field(gt=0, lt=1)] = 0.5
    """Factor on the loss scale after a step whose gradients overflow; that step's update is skipped."""
    growth_interval: Count = 2000
    """Consecutive steps without an overflow after which the loss scale grows."""

    @model_validator(mode="wrap")
    @classmethod
    def _fill(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Complete what follows from the policy; it does not count as set."""
        if not isinstance(values, dict):
            return validate(values)
        # An unknown policy is reported by its own field alone.
        policy = NAMES.get(str(values.get("policy", "fp32")), str(values.get("policy", "fp32")))
        filled = dict(zip(("parameters", "compute", "reduce"), POLICIES.get(policy, POLICIES["fp32"]), strict=True))
        filled |= values
        scaled = filled["compute"] == "float16" != filled["parameters"]
        found = validate({"loss_scale": 2.0**16 if scaled else 0.0} | filled)
        found.model_fields_set.intersection_update(values)
        return found

    @field_validator("policy", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return NAMES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _double(self) -> "Precision":
        dtypes = {self.parameters, self.compute, self.reduce}
        if "float64" in dtypes and dtypes != {"float64"}:
            raise ValueError(
                f"precision.parameters = {self.parameters}, compute = {self.compute}, reduce = {self.reduce}: "
                "float64 is for proofs and is all or nothing; use --precision fp64"
            )
        return self

    @property
    def narrow(self) -> bool:
        """Whether numbers of 16 bits are among them."""
        return bool({"bfloat16", "float16"} & {self.parameters, self.compute, self.reduce})

    def recovers(self, loss_scale: float | None) -> bool:
        """Whether a smaller loss scale may mend a step that is not finite: until it is 1, where DeepSpeed stops too."""
        return loss_scale is not None and loss_scale > 1
