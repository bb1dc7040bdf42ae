# ctest reads this file when it starts: it asks each program for its tests and adds them as
# "program.Suite.name". A program that is missing or does not answer is a test that fails.
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
    # 77: the test skipped itself. None of a short selection may.
    if(NOT is_short)
      set_tests_properties("${program}.${name}" PROPERTIES SKIP_RETURN_CODE 77)
    endif()
  endforeach()
endforeach()
