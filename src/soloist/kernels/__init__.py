"""Operators: functions of tensors, each with its equation, reference, kernel and launcher in one file."""
