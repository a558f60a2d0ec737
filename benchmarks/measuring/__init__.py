"""What benchmarks measure with: this machine's profile, one rank of many, an emulated link."""
