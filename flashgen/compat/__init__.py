"""Drop-in stand-ins for other libraries' functions: their names, arguments, layouts and conventions over our kernels.

    from flashgen.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
"""
