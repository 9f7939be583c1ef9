"""The software that compiles and runs kernels, as conditions of the rules that need them."""

from fusible.fuser.conditions import at_least, this
from fusible.versions import CUDA_DRIVER, CUDNN_FRONTEND, CUTLASS_DSL

CUTLASS = at_least(
    this.cutlass_dsl, CUTLASS_DSL, f"pip install 'nvidia-cutlass-dsl[cu13]>={CUTLASS_DSL}'"
)
CUDNN = at_least(
    this.cudnn_frontend, CUDNN_FRONTEND, f"pip install 'nvidia-cudnn-frontend>={CUDNN_FRONTEND}'"
)
DRIVER = at_least(this.cuda_driver, CUDA_DRIVER, "update the GPU's driver")
