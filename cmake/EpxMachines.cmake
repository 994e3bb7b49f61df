# SPDX-License-Identifier: Apache-2.0
# The machine files of `epx predict`, as text inside the program.
file(GLOB epx_machine_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tools/machines/*.machine)
set(epx_machines "")
foreach(file ${epx_machine_files})
    get_filename_component(name ${file} NAME_WE)
    file(READ ${file} text)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
    string(REPLACE "\\" "\\\\" text "${text}")
    string(REPLACE "\"" "\\\"" text "${text}")
    string(REPLACE "\n" "\\n\"\n     \"" text "${text}")
    string(APPEND epx_machines "    {\"${name}\",\n     \"${text}\"},\n")
endforeach()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/epx_machines.c @ONLY CONTENT
    "#include \"tools/epx/predict.h\"\n\nconst struct machine_text machine_texts[] = {\n@epx_machines@    {0}};\n")
