"""Bolt's operators: bolt.py is the Backend, impl/ the functions, register_ops.py the list."""
