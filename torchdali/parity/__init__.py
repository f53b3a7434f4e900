"""How close torchdali is to torchvision, transform by transform."""
