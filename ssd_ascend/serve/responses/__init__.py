"""POST /v1/responses: OpenAI's newer endpoint over the same engine, without anything kept between requests."""
