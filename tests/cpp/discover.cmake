# ctest reads this file when it starts. It runs each program to list its tests, and adds them as
# "program.Suite.name". A program that is missing or lists no test becomes a test that fails.
foreach(program IN LISTS programs)
  set(names "")
  if(EXISTS "${folder}/${program}")
    execute_process(COMMAND ${launcher} "${folder}/${program}" --list OUTPUT_VARIABLE names)
  endif()
  if(names STREQUAL "")
    add_test("${program}.NOT_BUILT" "${folder}/${program}" --list)
  endif()
  string(REGEX MATCHALL "[^\n]+" names "${names}")
  foreach(name IN LISTS names)
    add_test("${program}.${name}" ${launcher} "${folder}/${program}" --only "${name}")
    # 77: the test skipped itself. Tests of a short selection may not.
    if(NOT is_short)
      set_tests_properties("${program}.${name}" PROPERTIES SKIP_RETURN_CODE 77)
    endif()
  endforeach()
endforeach()
