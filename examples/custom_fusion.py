"""An op of your own, and a rule of your own that fuses it with the scale after it."""

import torch

import fusible as fz
from fusible.extend import equal, one_of, rule, this


class SquaredReLU(fz.BasicOperation):
    """``max(x, 0)^2``; the formula is all there is to write, its gradient follows."""

    def formula(self, x):
        return torch.relu(x).square()


class ScaledSquaredReLU(fz.FusedOperation):
    """The op and a constant scale, in place after the first pass; saves only the ReLU."""

    def fuser_forward(self, basic_op_ctxs, input_, **_):
        y = torch.relu(input_)
        basic_op_ctxs[0].save_for_backward(y)
        return y.square().mul_(self.basic_ops[1].scale), [(), ()]

    def fuser_backward(self, basic_op_ctxs, grad_output, **_):
        (y,) = basic_op_ctxs[0].saved_tensors
        return (2 * self.basic_ops[1].scale) * y * grad_output, [(), ()], [(), ()]


@rule(equal(this.recipe, "none"), one_of(this.input.dtype, "float32", "bfloat16"))
def scaled_squared_relu(act: SquaredReLU, scale: fz.ConstantScale) -> ScaledSquaredReLU:
    """One tensor less from memory, each way."""
    return ScaledSquaredReLU([act, scale])


def main():
    fz.register_rule(scaled_squared_relu)
    mlp = fz.Sequential(
        fz.Linear(64, 256), SquaredReLU(), fz.ConstantScale(0.5), fz.Linear(256, 64)
    )
    print(fz.explain(mlp, torch.randn(32, 64, requires_grad=True)))
    return mlp


if __name__ == "__main__":
    main()
