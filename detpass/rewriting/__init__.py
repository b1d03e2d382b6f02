"""The engine that applies rules to joint graphs. It knows any rule and names no operator."""
