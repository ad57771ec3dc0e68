"""How large and how small the tensors of a program get, who is suspected for it, and exact ways out."""
