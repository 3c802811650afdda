"""The start of a GPU engine: compiles and loads kernels, makes and captures passes."""
