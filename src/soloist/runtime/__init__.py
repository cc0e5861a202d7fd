"""What runs a step: its buffers, the model with its cache, the sampler, the ring of committed tokens. No policy."""
