"""The kernels in the models of other libraries. Each module can be imported without its library."""
