"""What clients send: one schema module per API. A field is applied or refused, never ignored in silence.

Fields that change nothing here, such as a name for billing, are listed in each schema with `NO_EFFECT`.
"""
