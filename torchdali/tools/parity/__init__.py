"""``torchdali parity``: how close torchdali is to torchvision, transform by transform."""
