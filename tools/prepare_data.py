"""The program txl-prepare-data of this clone: see txl_programs/prepare_data.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
