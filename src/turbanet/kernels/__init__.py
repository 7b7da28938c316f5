"""The whole training of a tiny network as one GPU kernel: a reader of a member's step and an emitter of the kernel."""
