"""Tools: programs and servers that speak the Model Context Protocol (MCP), and the calls that a model makes of them.

`config` reads mcp.json, `server` runs one server, `toolbox` all of them; `permissions` says what may run unasked, and
`calls` runs what a model called. A server is untrusted: whatever it does costs one sentence.
"""
