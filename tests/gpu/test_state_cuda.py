"""The CPU's tests of state dicts on a GPU: where quantized weights are made by the kernels."""

import pytest
from test_state import (  # noqa: F401
    test_attributes_survive,
    test_files_keep_the_bits,
    test_layouts_and_precisions_load_into_each_other,
    test_layouts_load_into_each_other,
    test_through_torchs_state_dict,
    test_transformer_engines_names,
    test_views_of_one_buffer_stay_views_in_a_copy,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_cuda")]
