"""`python -m sentinel_bench` is the same as `sentinel-bench`."""

from sentinel_bench.cli import main

if __name__ == "__main__":
    main()
