"""Recipes: the number formats of the operands of matrix products, under TE's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Literal, get_args

from fusible.arguments import check_bools
from fusible.names import nearest
from fusible.recipes.formats import (
    E2M1,
    E4M3,
    E5M2,
    Element,
    NumberFormat,
    fp8_block,
    fp8_tensor,
    mxfp8,
    nvfp4,
)

Role = Literal["input", "weight", "grad"]
"""An operand of a matrix product: the activation, the weight, the gradient of the output."""

_ROLES: tuple[Role, ...] = get_args(Role)


class Format(Enum):
    """The elements of a recipe, forward and backward."""

    E2M1 = "E2M1 forward and backward"
    E4M3 = "E4M3 forward and backward"
    E5M2 = "E5M2 forward and backward"
    HYBRID = "E4M3 for inputs and weights, E5M2 for gradients"

    def element(self, role: Role) -> Element:
        """Return the element type of the operand in ``role``."""
        if self is Format.HYBRID:
            return E5M2 if role == "grad" else E4M3
        return E5M2 if self is Format.E5M2 else E4M3


_FP8_FORMATS = (Format.E4M3, Format.E5M2, Format.HYBRID)


@dataclass(frozen=True)
class _Options:
    """Options of which those that are declared as bools must be bools."""

    def __post_init__(self) -> None:
        flags = {f.name: getattr(self, f.name) for f in fields(self) if f.type in ("bool", bool)}
        check_bools(type(self).__name__, **flags)


@dataclass(frozen=True)
class MMParams(_Options):
    """How a product accumulates in Transformer Engine; accepted and ignored, sums are in FP32."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams(_Options):
    """How a recipe quantizes an operand; read from a recipe, not an argument of one."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


def _is_named(name: str | None) -> Any:
    """A class method as in Transformer Engine, which tells whether a recipe has this name."""

    def is_named(cls: type[Recipe]) -> bool:
        return cls.name == name

    is_named.__doc__ = f"Return whether the recipe is {name or 'one that is not offered: False'}."
    return classmethod(is_named)


def _params_of(role: Role) -> property:
    """A property as in Transformer Engine: how a recipe quantizes the operand ``role``."""

    def params(self: Any) -> QParams:
        return self._params(role)

    params.__doc__ = f"How the {role} is quantized."
    return property(params)


@dataclass(frozen=True)
class Recipe(_Options):
    """Number formats of the operands of every matrix product run under it.

    Frozen and hashable, because plans are cached by recipe. Subclasses override ``format`` and set
    ``name``, by default that of the class, which conditions of fusion rules read and ``explain``
    prints.
    """

    name: ClassVar[str] = "none"
    backward_override: ClassVar[str | None] = None
    fp8_products: ClassVar[bool] = True
    """Whether Hopper's kernels may multiply FP8 operands rather than their dequantized values."""
    mixed_roles: ClassVar[tuple[Role, ...]] = ()
    """Operands that the forward and the backward read in different formats."""
    is_mixed: ClassVar[bool] = False
    """Whether ops of a run have recipes of their own."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.name == "none":  # by which rules know that nothing is quantized
            cls.name = cls.__name__

    def format(self, role: Role) -> NumberFormat | None:
        """Return the format of the operand in ``role``; None keeps it in high precision."""
        if role not in _ROLES:
            raise ValueError(f"role must be one of {', '.join(_ROLES)}, got {role!r}")
        return None

    def backward_format(self, role: Role) -> NumberFormat | None:
        """Return the format in which the backward reads an operand, by default ``format``'s."""
        return self.format(role)

    @property
    def of_fp8_products(self) -> Recipe:
        """The recipe by whose formats the operands of Hopper's FP8 products are quantized."""
        return self

    def over(self, start: int, stop: int) -> Recipe | None:
        """Return the recipe of ops ``start`` to ``stop`` of a run: this one."""
        return self

    @property
    def quantizes(self) -> bool:
        """Whether any operand is quantized."""
        formats = (*map(self.format, _ROLES), *map(self.backward_format, _ROLES))
        return any(fmt is not None for fmt in formats)

    mxfp8 = _is_named("mxfp8")
    nvfp4 = _is_named("nvfp4")
    float8_block_scaling = _is_named("fp8_block")
    float8_current_scaling = float8_per_tensor_scaling = _is_named("fp8_current")
    custom = delayed = _is_named(None)  # recipes that are not offered

    def as_constants(self) -> tuple[Any, ...]:
        """Return the class and its arguments, constants even to ``torch.compile``."""
        values = [getattr(self, f.name) for f in fields(self) if f.compare]
        return type(self), *[v.as_constants() if isinstance(v, Recipe) else v for v in values]

    @staticmethod
    def from_constants(constants: Any) -> Any:
        """Undo ``as_constants``; return what is no recipe's constants as it is."""
        kind = constants[0] if isinstance(constants, tuple) and constants else None
        if not (isinstance(kind, type) and issubclass(kind, Recipe)):
            return constants
        return kind.of_constants(constants[1:])

    @classmethod
    def of_constants(cls, values: tuple[Any, ...]) -> Recipe:
        """Make one of its arguments as ``as_constants`` gives them."""
        names = [f.name for f in fields(cls) if f.compare]
        return cls(**dict(zip(names, map(Recipe.from_constants, values), strict=True)))


@dataclass(frozen=True, repr=False)
class _Scaling(Recipe):
    """A recipe of Transformer Engine, which quantizes all operands alike."""

    _: KW_ONLY
    backward_override: Literal["high_precision", "dequantized"] | None = None  # type: ignore[misc]
    """The backward multiplies by ``"high_precision"`` operands, those of before the quantization,
    or by the ``"dequantized"`` ones of the forward, and does not quantize gradients."""
    fp8_dpa: bool = False
    fp8_mha: bool = False

    only: ClassVar[tuple[str, ...]] = ("fp8_dpa", "fp8_mha")
    """Fields of te.ops' recipe that may only have their default, which is what the package does."""
    _format: ClassVar[Callable[..., NumberFormat]]
    """A method, the format of a role."""
    _formats: ClassVar[dict[Role, NumberFormat]]
    """The formats of this recipe, by the roles that it quantizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.backward_override not in (None, "high_precision", "dequantized"):
            raise ValueError(
                f'backward_override of {name} must be None, "high_precision" or "dequantized", '
                f"got {self.backward_override!r}"
            )
        if getattr(self, "fp8_format", Format.E4M3) not in _FP8_FORMATS:
            raise TypeError(
                "fp8_format must be Format.E4M3, Format.E5M2 or Format.HYBRID, got "
                f"{self.fp8_format!r}"  # type: ignore[attr-defined]
            )
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in self.only and value != f.default:
                raise ValueError(
                    f"{name} must have {f.name}={f.default}, got {value}; "
                    "other values are not supported"
                )
        # Made once: calls look them up.
        quantized = [r for r in _ROLES if r != "grad" or self.backward_override is None]
        object.__setattr__(self, "_formats", {role: self._format(role) for role in quantized})

    def __repr__(self) -> str:
        """Name the fields that are not the defaults."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def _params(self, role: Role) -> QParams:
        """How the operand in ``role`` is quantized, in Transformer Engine's words."""
        fmt = self._format(role)
        return QParams(
            power_2_scale=fmt.scale == "fp32_power_of_two",
            random_hadamard_transform=fmt.hadamard,
            stochastic_rounding=fmt.stochastic,
            fp4_2d_quantization=fmt.element is E2M1 and not fmt.directional,
        )

    def format(self, role: Role) -> NumberFormat | None:
        """Return the recipe's format, None for a gradient if there is a ``backward_override``."""
        found = self._formats.get(role)
        return super().format(role) if found is None else found


@dataclass(frozen=True, repr=False)
class MXFP8BlockScaling(_Scaling):
    """FP8 elements with one power-of-two scale per 32 along the reduction (OCP MX)."""

    fp8_format: Format = Format.E4M3
    _: KW_ONLY
    margin: int = 0
    enable_2d_quantization: bool = False
    fp8_products: bool = False  # type: ignore[misc]
    """On Hopper, linears, grouped linears, MLPs and experts multiply FP8 operands, which have one
    power-of-two scale per 128 along the reduction, of weights per 128x128: those of
    ``Float8BlockScaling()``. An element that is below 2^-6 of its new scale keeps fewer bits: its
    error is at most 2^-10 of that scale, 2^-17 of the block's largest magnitude. By default, and
    on other machines, products read the values of the recipe's own format."""

    name: ClassVar[str] = "mxfp8"
    only: ClassVar[tuple[str, ...]] = (*_Scaling.only, "margin", "enable_2d_quantization")

    def __post_init__(self) -> None:
        super().__post_init__()
        of_blocks = Float8BlockScaling(fp8_format=self.fp8_format) if self.fp8_products else self
        object.__setattr__(self, "_of_blocks", of_blocks)

    @property
    def of_fp8_products(self) -> Recipe:
        """Return that of blocks of 128, if ``fp8_products`` are on."""
        return self._of_blocks  # type: ignore[attr-defined]

    def _format(self, role: Role) -> NumberFormat:
        return mxfp8(self.fp8_format.element(role))


@dataclass(frozen=True, repr=False)
class _Float8Scaling(_Scaling):
    """A recipe of FP8 elements with FP32 scales."""

    _: KW_ONLY
    # No number depends on these.
    fp8_gemm_fprop: MMParams = field(default=MMParams(), compare=False)
    fp8_gemm_dgrad: MMParams = field(default=MMParams(), compare=False)
    fp8_gemm_wgrad: MMParams = field(default=MMParams(), compare=False)
    fp8_products: bool = True  # type: ignore[misc]
    """On Hopper, linears, grouped linears, MLPs and experts multiply the FP8 operands, or with
    False their dequantized values in BF16, added in FP32."""

    fp8_quant_fwd_inp = _params_of("input")
    fp8_quant_fwd_weight = _params_of("weight")
    fp8_quant_bwd_grad = _params_of("grad")


@dataclass(frozen=True, repr=False)
class Float8BlockScaling(_Float8Scaling):
    """FP8 with FP32 scales: per 1x128 for activations and gradients, per 128x128 for weights."""

    use_f32_scales: bool = False
    """FP32 scales as they are; by default they are rounded to powers of two."""
    _: KW_ONLY
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    name: ClassVar[str] = "fp8_block"
    only: ClassVar[tuple[str, ...]] = (
        *_Scaling.only,
        "x_block_scaling_dim",
        "w_block_scaling_dim",
        "grad_block_scaling_dim",
    )

    def _format(self, role: Role) -> NumberFormat:
        block = (128, 128) if role == "weight" else (1, 128)
        element = self.fp8_format.element(role)
        return fp8_block(element, block, power_of_two=not self.use_f32_scales)


@dataclass(frozen=True, repr=False)
class Float8CurrentScaling(_Float8Scaling):
    """FP8 with one FP32 scale per tensor, from the tensor's own largest magnitude."""

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False

    name: ClassVar[str] = "fp8_current"

    def _format(self, role: Role) -> NumberFormat:
        return fp8_tensor(self.fp8_format.element(role), power_of_two=self.use_power_2_scales)


@dataclass(frozen=True, repr=False)
class NVFP4BlockScaling(_Scaling):
    """E2M1 with one E4M3 scale per 16 along the reduction and one FP32 scale per tensor.

    By default, as Transformer Engine's (arXiv 2509.25149, section 4): the operands of the weight
    gradient, which are inputs and gradients column-wise, are Hadamard-transformed with fixed random
    signs, gradients are rounded stochastically, and weights have one scale per 16x16, so that all
    products read the same values of a weight. Each can be disabled; with all three disabled all
    operands are rounded to the nearest, in blocks of 16 along the reduction.

    Unlike there, no environment variable changes a default; inputs may be FP32 and FP16, and have
    any number of rows: the last rows of a group, fewer than 16, are not transformed; a random
    number of a rounding is that of the element's place (``recipes.philox``), whatever the kernel,
    from a key that PyTorch's generator draws for each tensor. ``nvfp4_4over6`` and
    ``row_scaled_activation`` are not supported.
    """

    _: KW_ONLY
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = field(default="all", compare=False)
    nvfp4_4over6_err_mode: str = field(default="MAE", compare=False)
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3

    name: ClassVar[str] = "nvfp4"
    only: ClassVar[tuple[str, ...]] = (
        *_Scaling.only,
        "row_scaled_activation",
        "nvfp4_4over6",
        "fp4_format",
        "fp8_format",
    )

    fp4_quant_fwd_inp = _params_of("input")
    fp4_quant_fwd_weight = _params_of("weight")
    fp4_quant_bwd_grad = _params_of("grad")

    def _format(self, role: Role) -> NumberFormat:
        if role == "weight":
            return nvfp4((1, 16) if self.disable_2d_quantization else (16, 16))
        rounded = role == "grad" and not self.disable_stochastic_rounding
        return nvfp4(hadamard=not self.disable_rht, stochastic=rounded)


class _NotOffered:
    """A class of Transformer Engine; making one raises TypeError with the reason."""

    why: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(f"{type(self).__name__} is not offered: {self.why}")


class DelayedScaling(_NotOffered):
    """Not offered; making one raises TypeError."""

    why = (
        "its scales come from earlier calls, which checkpointing, graph replay and evaluation "
        "disturb; use Float8CurrentScaling"
    )


class Float8Quantizer(_NotOffered):
    """Not offered; making one raises TypeError."""

    why = "its scales are those of DelayedScaling; use Float8CurrentScalingQuantizer"


class CustomRecipe(_NotOffered):
    """Not offered; making one raises TypeError."""

    why = "derive a recipe from recipes.Recipe, whose format(role) says how an operand is quantized"


_DEFAULT = MXFP8BlockScaling()  # one object: every scope without a recipe asks for it


def get_default_recipe() -> Recipe:
    """Return ``MXFP8BlockScaling()``, the recipe of a scope that names none, on every machine."""
    return _DEFAULT


def check_scope(function: str, enabled: object, recipe: object) -> Recipe:
    """The recipe of a scope, by default ``MXFP8BlockScaling()``.

    Raises:
        TypeError: ``enabled`` is not a bool, or ``recipe`` is not a ``Recipe``.
        ValueError: ``recipe`` transforms one operand of a product alone.
    """
    if enabled is not True and enabled is not False:
        raise TypeError(
            f"enabled of {function} must be a bool, got {enabled!r:.200}; "
            f"pass a recipe by name: {function}(recipe={_meant(enabled)})"
        )
    if recipe is None:
        return get_default_recipe()
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"recipe of {function} must be a recipe of fusible.recipes, got {recipe!r:.200}; "
            f"pass recipe={_meant(recipe)}"
        )
    check_transforms(recipe)
    return recipe


def check_transforms(recipe: Recipe) -> None:
    """Raise ValueError unless both operands of each product are transformed, or neither is.

    Only column-wise forms are, which the backward reads.
    """
    formats = {role: recipe.backward_format(role) for role in _ROLES}
    x, w, dy = [fmt is not None and fmt.hadamard for fmt in formats.values()]
    if w or (x != dy and recipe.backward_override is None):
        named = ", ".join(f"{fmt.name} of {role}" for role, fmt in formats.items() if fmt)
        raise ValueError(
            "formats with hadamard must be those of input and grad, both or neither, and not of "
            f"weight: they are the operands of one product; {type(recipe).__name__} has {named}"
        )


def _meant(given: object) -> str:
    """A suggestion for a misspelt recipe, as code: the likely one, or all of them."""
    if isinstance(given, Recipe):
        return repr(given)
    kinds = MXFP8BlockScaling, NVFP4BlockScaling, Float8BlockScaling, Float8CurrentScaling
    names = {name.lower(): kind for kind in kinds for name in (kind.name, kind.__name__)}
    # A recipe's name, its class, or a recipe of another package.
    kind = given if isinstance(given, type) else type(given)
    word = given if isinstance(given, str) else kind.__name__
    name = nearest(word.lower(), names)
    meant = kinds if name is None else [names[name]]
    return " or ".join(f"{kind.__name__}()" for kind in meant)
