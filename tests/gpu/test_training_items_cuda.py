"""The CPU's tests of training on a Hopper GPU: every item on every path, by its own kernels.

CUDA is the default device in them, which is also a way that users have.
"""

import pytest
from checks import hopper
from test_buffers import (  # noqa: F401
    test_a_buffer_that_does_not_fit,
    test_a_gradient_in_the_way,
    test_an_op_called_alone_and_without_gradients,
    test_an_output_that_is_still_needed,
    test_only_at_the_ends_of_a_run,
    test_refused_while_compiling,
    test_same_bits_in_the_callers_memory,
)
from test_buffers import test_no_rows as test_buffers_of_no_rows  # noqa: F401
from test_training import (  # noqa: F401
    TestCompiled,
    test_checkpoint_around,
    test_checkpoint_inside,
    test_checkpoint_saves_the_inputs_only,
    test_modules_in_each_others_backward,
    test_no_rows,
    test_offload,
    test_re_entrant_use,
    test_rows_that_are_not_in_use_may_hold_anything,
    test_threads_with_different_recipes,
    test_what_is_saved_is_all_that_is_kept,
)
from test_training_of_fusions import test_buffers as test_buffers_of_rules  # noqa: F401
from test_training_of_fusions import test_delayed as test_delayed_of_rules  # noqa: F401
from test_training_of_fusions import test_main_grads as test_main_grads_of_rules  # noqa: F401
from test_weight_grads import TestCompiled as TestCompiledGradients  # noqa: F401
from test_weight_grads import (  # noqa: F401
    test_a_copy_waits_for_nothing,
    test_a_flat_main_grad_and_one_that_is_handed_out,
    test_a_main_grad_that_does_not_fit,
    test_delayed,
    test_delayed_into_main_grad,
    test_delayed_micro_batches,
    test_delayed_with_a_scaled_single_bias,
    test_each_weight_has_its_own_flag,
    test_frozen_weights_are_left_alone,
    test_gradients_lie_as_their_weights,
    test_main_grad_is_added_to,
    test_main_grads_lie_anyhow,
    test_what_autograd_gets_instead,
)

pytestmark = [*hopper, pytest.mark.usefixtures("on_cuda")]


@pytest.fixture(autouse=True)
def _not_of_blackwell(request):
    if "sm100" in str(getattr(request.node, "callspec", None)):
        pytest.skip("what stands in for Blackwell's kernels is tested on the CPU")
