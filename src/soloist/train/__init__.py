"""Training: drafts for any model, and the differentiable forms of the operators that any training needs."""
