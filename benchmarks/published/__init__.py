"""Published training runs, and how far meshfold's predictions are from them."""
