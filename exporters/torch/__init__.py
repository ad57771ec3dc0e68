"""The kind of model that torch.export captures: its plan settled and its forms made."""
