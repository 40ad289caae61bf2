"""The server: OpenAI's routes over an engine, with steering, captures and a playground.

It needs the packages of the extra `serve`.
"""
