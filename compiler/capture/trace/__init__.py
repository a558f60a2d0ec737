"""A fake copy of the model, torch.export, and its graph lowered to plain data."""
