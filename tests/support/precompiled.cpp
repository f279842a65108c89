// SPDX-License-Identifier: Apache-2.0
// Only carries precompiled.h: CMake precompiles headers for a target with a source file.
