"""Least-squares fits of measured step times.

A parameter comes with its interval, a fit with its errors or with the reason why there is none.
"""
