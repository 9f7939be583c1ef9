"""CuTe DSL code that runs on the GPU; nothing outside a first launch imports it."""
