// SPDX-License-Identifier: Apache-2.0
// {fmt}'s own code, compiled once: as header-only code it costs three seconds of every file that
// formats a text, and Debian has it otherwise only as a shared library, which the shipped library
// may not need. What its headers declare `extern template` is instantiated here.
#include <fmt/format-inl.h>

FMT_BEGIN_NAMESPACE
namespace detail {

template auto thousands_sep_impl<char>(locale_ref) -> thousands_sep_result<char>;
template auto decimal_point_impl(locale_ref) -> char;
template void vformat_to(buffer<char>&, string_view, basic_format_args<buffer_context<char>>,
                         locale_ref);

}  // namespace detail
FMT_END_NAMESPACE
