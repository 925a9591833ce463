"""The kernels inside other people's models; each module needs its framework only when it is called."""
