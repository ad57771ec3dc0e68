"""Models of other servers, written as model folders: a Triton model repository, a TorchServe archive."""
