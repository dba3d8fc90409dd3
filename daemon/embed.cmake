# cmake -DINPUT=FILE -DOUTPUT=FILE.c -P embed.cmake: the bytes of a file as a C array. Without
# INPUT an empty one.
set(bytes "0")
set(n 0)
if(INPUT)
  file(READ ${INPUT} hex HEX)
  string(LENGTH "${hex}" digits)
  math(EXPR n "${digits} / 2")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${hex}")
endif()
file(WRITE ${OUTPUT}
  "#include \"daemon/schema.h\"\nconst uint8_t schema_bytes[] = {${bytes}};\nconst size_t schema_n_bytes = ${n};\n")
