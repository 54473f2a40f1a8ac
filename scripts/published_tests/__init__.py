"""SGLang's own tests against our server: see `scripts.published_tests.__main__`."""
