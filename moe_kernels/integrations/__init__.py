"""Integrations with other libraries' models. Each module can be imported without its library."""
