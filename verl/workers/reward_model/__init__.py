"""A reward model at work: what it reads (`template`), and how texts are scored (`scores`)."""
