"""The HTTP interface; knows neither arrays nor plans."""
