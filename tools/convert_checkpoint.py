"""The program txl-convert-checkpoint of this clone: see txl_programs/convert_checkpoint.py."""

from txl_programs import main

if __name__ == "__main__":
    main()
