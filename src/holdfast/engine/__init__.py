"""The shell: when, where and with which resources the core's decisions are made and kept."""
