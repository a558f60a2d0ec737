"""The best plan with stages and microbatches: best-first over pipeline degrees."""
